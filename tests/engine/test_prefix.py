"""A block's name follows from everything its contents follow from, and from nothing else."""

from __future__ import annotations

import struct
from hashlib import sha256

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.prefix import Chain, root
from baton.ipc.frames import Terms

TERMS = Terms("m", tenant="a")
ROOT = root(TERMS, "w", share_between_tenants=False)


def identities(chain: Chain) -> list[bytes]:
    return [chain.link(number).identity for number in range(chain.full)]


def test_a_name_is_the_hash_of_the_parent_and_the_tokens() -> None:
    first, second = identities(Chain(ROOT, 2, [1, 2, 3, 4, 5]))
    head = b"block" + (8).to_bytes(8, "little")
    content = (1).to_bytes(4, "little") + (2).to_bytes(4, "little")
    assert first == sha256(head + ROOT + content).digest()
    content = (3).to_bytes(4, "little") + (4).to_bytes(4, "little")
    assert second == sha256(head + first + content).digest()


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=40),
    st.lists(st.integers(0, 2**32 - 1), max_size=20),
    st.integers(1, 7),
    st.data(),
)
def test_it_does_not_matter_what_is_prompt_and_what_is_output_nor_when_it_is_asked(
    prompt: list[int], output: list[int], size: int, data: st.DataObject
) -> None:
    whole = Chain(ROOT, size, prompt + output)
    growing: list[int] = []
    chain = Chain(ROOT, size, prompt, growing)
    for token in output:
        if chain.full and data.draw(st.booleans()):
            chain.link(data.draw(st.integers(0, chain.full - 1)))
        growing.append(token)
    assert (chain.tokens, chain.full) == (len(prompt) + len(output), (len(prompt) + len(output)) // size)
    links = [chain.link(number) for number in range(chain.full)]
    assert links == [whole.link(number) for number in range(whole.full)]
    assert [link.parent for link in links] == [ROOT, *(link.identity for link in links)][: len(links)]
    packed = b"".join(link.content for link in links)
    assert packed == b"".join(t.to_bytes(4, "little") for t in (prompt + output)[: len(links) * size])


@given(st.lists(st.integers(0, 3), min_size=8, max_size=24), st.lists(st.integers(0, 3), min_size=8, max_size=24))
def test_names_are_equal_as_far_as_the_tokens_are(one: list[int], other: list[int]) -> None:
    for number, (a, b) in enumerate(
        zip(identities(Chain(ROOT, 4, one)), identities(Chain(ROOT, 4, other)), strict=False)
    ):
        end = 4 * (number + 1)
        assert (a == b) == (one[:end] == other[:end])


def test_a_block_that_is_not_full_has_no_name() -> None:
    with pytest.raises(AssertionError, match="tokens 4 to 8 asked of 7"):
        Chain(ROOT, 4, [1, 2, 3, 4, 5, 6], [7]).link(1)


def test_a_token_id_that_is_no_uint32_is_our_own_fault() -> None:
    with pytest.raises(struct.error):
        Chain(ROOT, 1, [-1]).link(0)


@pytest.mark.parametrize("field", ["tenant", "adapter_digest"])
def test_what_differs_in_the_terms_differs_in_the_root(field: str) -> None:
    other = msgspec.structs.replace(TERMS, **{field: "b"})
    assert root(other, "w", share_between_tenants=False) != ROOT


def test_other_weights_and_another_salt_have_another_root() -> None:
    roots = {
        ROOT,
        root(TERMS, "w2", share_between_tenants=False),
        root(TERMS, "w", share_between_tenants=False, salt="s"),
    }
    assert len(roots) == 3


def test_what_a_request_is_called_and_how_urgent_it_is_changes_nothing() -> None:
    other = msgspec.structs.replace(TERMS, workflow="x", service_class="y", deadline_ns=5)
    assert root(other, "w", share_between_tenants=False) == ROOT


def test_tenants_share_where_they_are_configured_to_and_only_there() -> None:
    other = Terms("m", tenant="b")
    assert root(TERMS, "w", share_between_tenants=True) == root(other, "w", share_between_tenants=True)
    assert root(other, "w", share_between_tenants=True) != root(Terms("m"), "w", share_between_tenants=False)
    salted = [root(terms, "w", share_between_tenants=True, salt="s") for terms in (TERMS, other)]
    assert salted[0] == salted[1] != root(TERMS, "w", share_between_tenants=True)


FIELDS = st.tuples(*[st.text("ab", max_size=3)] * 4)


@given(FIELDS, FIELDS)
def test_no_two_sets_of_fields_read_the_same(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    roots = [
        root(Terms("m", tenant=tenant, adapter_digest=adapter), weights, share_between_tenants=False, salt=salt)
        for tenant, adapter, weights, salt in (one, other)
    ]
    assert (roots[0] == roots[1]) == (one == other)


def test_fields_that_run_together_are_told_apart() -> None:
    one = root(Terms("m", tenant="ab", adapter_digest="c"), "w", share_between_tenants=False)
    other = root(Terms("m", tenant="b", adapter_digest="ca"), "w", share_between_tenants=False)
    assert one != other
