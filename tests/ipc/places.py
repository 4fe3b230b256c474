"""What the tests of links share: a small board, and who is who."""

from __future__ import annotations

from baton.engine.limits import Limits
from baton.ipc.board import Board
from baton.ipc.frames import Address, Role

LIMITS = Limits(inbox_frames_max=4, frame_bytes_max=4096)


def make_board() -> Board:
    """One frontend, eight rows."""
    return Board.format(bytearray(Board.size(1, 8)), 1, 8)


def address(role: Role, incarnation: int = 1, index: int = 0) -> Address:
    """A process of this server."""
    return Address(role, "m", 0, index, incarnation)
