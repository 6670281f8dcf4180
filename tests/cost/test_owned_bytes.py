import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_samples import sample_model
from evenload.cost.memory import owned_pipeline_bytes, pipeline_bytes, rank_view
from evenload.types.columns import whole_document_columns
from evenload.types.layout import even_layout
from evenload.types.pipeline import PackBytes


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=12),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 4),
    st.booleans(),
    st.data(),
)
def test_bytes_are_those_of_the_fullest_rank(lengths, cp, packs, mixed, data) -> None:
    """All ranks are priced in one call; rank by rank, as each of them counts, gives the same."""
    num_tokens = np.array(lengths, np.int64)
    groups = [part.tolist() for part in np.array_split(np.arange(len(lengths)), packs)]
    count = len(lengths)
    owner = np.array(data.draw(st.lists(st.integers(-1, cp - 1), min_size=count, max_size=count)), np.int64)
    policy = (
        np.array(data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)), np.int8) if mixed else None
    )
    layout, model = even_layout(3, cp=cp), sample_model()
    columns = whole_document_columns(groups, num_tokens)
    columns = dataclasses.replace(columns, cp=np.where(owner < 0, cp, 1))
    found = owned_pipeline_bytes(model, layout, columns, columns, num_tokens, policy, (owner, owner))
    views = [rank_view(columns, owner, rank) for rank in range(cp)]
    held = [pipeline_bytes(model, layout, view, view, num_tokens, policy) for view in views]
    for field in dataclasses.fields(PackBytes):
        expected = np.max([getattr(one, field.name) for one in held], axis=0)
        assert getattr(found, field.name).tolist() == expected.tolist(), field.name


@pytest.mark.parametrize("packs", [0, 1])
def test_ranks_without_documents_hold_only_what_is_static(packs) -> None:
    columns = whole_document_columns([[0]] * packs, np.array([50]))
    columns = dataclasses.replace(columns, cp=np.ones(packs, np.int64))
    owner = np.ones(packs, np.int64)
    found = owned_pipeline_bytes(
        sample_model(), even_layout(3, cp=2), columns, columns, np.array([50]), None, (owner, owner)
    )
    assert found.forward_kept_bytes.shape == (packs, 1)
    assert (found.forward_kept_bytes > 0).all()
