"""Range attention: the one attention primitive and its backends."""
