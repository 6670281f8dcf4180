"""Give our micro-batches to trainers of others, each at its seam: its function that decides who trains what, and when.

A seam is a function with the name and arguments of the trainer's own, which returns what that returns, divided by
`evenload.micro_batches`. `install()` puts it in the place of the trainer's, in every module of the process that holds
that, and refuses a trainer whose function takes other arguments than the tested one. Every process that calls the
function needs it. What `install()` returns takes it back, by `uninstall()` or at the end of a `with` block:

    from evenload.seams import verl

    replaced = verl.install(max_tokens=16_384)

Nothing of a trainer is imported before `install()` or one of the functions is called.
"""
