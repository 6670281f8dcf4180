"""Ranks of tests start with everything imported: a server that found nothing to import would say nothing."""

from rank_server import rank_context, tell_modules


def test_what_ranks_use_is_imported_before_they_start():
    context = rank_context()
    ours, theirs = context.Pipe()
    process = context.Process(target=tell_modules, args=(theirs,))
    process.start()
    found, is_exact = ours.recv()
    process.join()
    assert {"torch", "transformers", "evenload.runtime.trainer", "matrix_cases", "training_cases"} <= found
    assert is_exact
