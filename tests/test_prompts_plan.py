"""Requests in groups: which are unpacked, within the scratch, and each by what it is and not by its neighbors."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from halfbyte.plans.prompts import ROWS, Group, bucket, groups, scratch_tokens


def test_long_chunks_are_unpacked_in_groups_that_fit_the_scratch() -> None:
    found = groups([64, 64, 16, 500, 64], [1000, 3000, 9000, 500, 5000], query_heads=4, scratch=4000)
    assert found == [
        Group(0, 2, True, False),  # 4,000 tokens
        Group(2, 3, False, False),  # too few new tokens
        Group(3, 4, True, False),
        Group(4, 5, False, False),  # longer than the scratch
    ]


def test_scratch_begins_anew_with_each_group() -> None:
    found = groups([ROWS] * 5, [600, 500, 500, 900, 100], query_heads=1, scratch=1000)
    assert [(g.first, g.last) for g in found] == [(0, 1), (1, 3), (3, 5)]


REQUESTS = st.lists(st.tuples(st.integers(1, 400), st.integers(0, 5000)), max_size=20)


@given(REQUESTS, st.integers(1, 8), st.integers(1, 8000), st.integers(1, 5), st.sampled_from([0, 132]))
def test_each_request_is_in_one_group_by_what_it_is(
    requests: list[tuple[int, int]], heads: int, scratch: int, drafts: int, exact: int
) -> None:
    queries, lengths = [n for n, _ in requests], [n + past for n, past in requests]
    options = {"query_heads": heads, "scratch": scratch, "drafts": drafts, "exact_tokens": exact}
    taken = [length + (count + exact if exact else 0) for count, length in zip(queries, lengths, strict=True)]
    assert taken == [scratch_tokens(count, length, exact) for count, length in zip(queries, lengths, strict=True)]
    parts = groups(queries, lengths, **options)
    assert [i for g in parts for i in range(g.first, g.last)] == list(range(len(requests)))
    for g in parts:
        assert not g.unpacked or sum(taken[g.first : g.last]) <= scratch
        assert {n <= drafts for n in queries[g.first : g.last]} == {g.decodes}
        for i in range(g.first, g.last):
            alone = groups(queries[i : i + 1], lengths[i : i + 1], **options)
            assert alone == [Group(0, 1, g.unpacked, g.decodes)]


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=30), st.integers(1, 5))
def test_buckets_are_few(queries: list[int], drafts: int) -> None:
    size = bucket(max(queries), drafts)
    assert size >= max(queries)
    assert size == drafts if max(queries) <= drafts else size & (size - 1) == 0
    assert size <= 2 * max([*queries, 4])
