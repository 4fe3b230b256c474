"""Who speaks in Baton, and about what: roles, the addresses of processes, and the key of one hand-over.

Imports nothing of Baton. Others import these names from ``ipc.frames``, the whole vocabulary.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

PLACES_MAX = 16  # indices a role may have

Slot = Annotated[int, Meta(ge=0)]
Index = Annotated[int, Meta(ge=0, lt=PLACES_MAX)]


class Role(enum.IntEnum):
    """What a process is. The numbers go into shared memory; they are names, not an order."""

    FRONTEND = 1
    TOKENIZER = 2
    SCHEDULER = 3
    WORKER = 4
    DETOKENIZER = 5
    SUPERVISOR = 6


class Address(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Who a process is: (role, model, replica, index) names a place, ``incarnation`` the process that fills it now."""

    role: Role
    model: str
    replica: int
    index: Index
    incarnation: int

    @property
    def place(self) -> tuple[Role, int]:
        """What stays when the process is restarted, within one replica."""
        return self.role, self.index

    def __str__(self) -> str:
        return f"{self.role.name.lower()}-{self.index}#{self.incarnation}"


class Key(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Names one hand-over of one request: accepted only if the row says the same."""

    slot: Slot
    generation: int
    epoch: int
