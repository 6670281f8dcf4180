import pytest

from revision_cases import told_of_revisions


@pytest.mark.parametrize(
    ("folders", "parts"),
    [
        (("/one/hub/aaa", "/two/hub/aaa"), ()),
        (("/one/hub/aaa", "/one/hub/bbb"), ("aaa on ranks [0]; bbb on ranks [1]", '"org/model@aaa"')),
        (("org/model", "/one/hub/bbb"), ("a folder of that name on ranks [0]; bbb on ranks [1]",)),
    ],
)
def test_ranks_that_would_load_other_weights_are_refused(gloo_pool, folders, parts):
    for told in gloo_pool.run(2, told_of_revisions, "org/model", folders):
        assert bool(told) == bool(parts)
        assert all(part in told for part in parts)
