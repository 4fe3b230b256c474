"""The board and the life table: who holds which request, and which process fills which place, in shared memory.

One row, one writer. A row's ownership lives twice; a writer fills the copy nobody reads and then flips one word, so a
writer that dies in the middle leaves the old row intact and a reader never sees a torn one. Every word is an aligned
64-bit load or store. The rules of who may write what are ``engine.ownership``'s; this module only stores.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from baton.engine.ownership import BoardRow
from baton.ipc.frames import PLACES_MAX, Role

MAGIC = 0x4E4F544142_04  # "BATON", layout 4
HEADER_WORDS, PLACE_WORDS, ROW_WORDS = 16, 32, 24
ROLES = max(Role) + 1
ROWS_AT = HEADER_WORDS + ROLES * PLACES_MAX * PLACE_WORDS
TOTALS_WORDS = 512  # what a frontend counts; behind the rows

# words of a place: the first three are the supervisor's, the rest the process's own
INCARNATION, PID, SINCE, PULSE, PHASE, EXPECTED, GAUGES, REACHED = 0, 1, 2, 3, 4, 5, 8, 24
#: what the scheduler publishes; preemptions and what is of prefixes only grow, from its start on
GAUGE_NAMES = (
    *("requests_running", "requests_waiting", "kv_blocks_total", "kv_blocks_free", "kv_blocks_cached"),
    *("preemptions_recompute", "preemptions_swap", "kv_tokens_total"),
    *("prefix_queries_tokens", "prefix_hits_tokens", "prefix_evictions_blocks"),
    *("ledger_growth", "ledger_resume", "ledger_headroom", "ledger_swapped"),
)
#: how far a process has come in starting; the number stands on the board, and behind it when each was reached
PHASES = ("starting", "importing", "loading", "warming", "ready")
# words of a row
VERSION, COPIES, IDENTITY, COUNTS, CANCEL, DELIVERED = 0, 1, 9, 15, 16, 17

_LOW = 0xFFFFFFFF
_lock = threading.Lock()


def fence() -> None:
    """A full memory fence: taking a lock is a locked instruction (the rules need store-load order)."""
    with _lock:
        pass


@dataclass(frozen=True, slots=True)
class PlaceView:
    """One process as the life table shows it; ``since_ns`` is when it was started, of the monotonic clock.

    ``expected_ns`` is how long it thinks the work at hand will take, during which its pulse may stand still;
    ``reached_ns`` is when it came to each of ``PHASES``, 0 where it did not, or passed it over.
    """

    role: Role
    index: int
    incarnation: int
    pid: int
    since_ns: int
    pulse: int
    phase: str
    expected_ns: int
    reached_ns: tuple[int, ...] = (0,) * len(PHASES)

    @property
    def ready(self) -> bool:
        """Whether its start-up is done."""
        return self.phase == PHASES[-1]

    def start_ms(self) -> dict[str, float]:
        """How long each phase of its start took, and under "ready" all of them; those that are over."""
        found, phase, since_ns = dict[str, float](), PHASES[0], self.since_ns
        for after, at_ns in zip(PHASES[1:], self.reached_ns[1:], strict=True):
            if at_ns:
                found[phase], phase, since_ns = round((at_ns - since_ns) / 1e6, 1), after, at_ns
        return found | ({"ready": round((since_ns - self.since_ns) / 1e6, 1)} if phase == PHASES[-1] else {})


@dataclass(frozen=True, slots=True)
class RowView:
    """One live request as the board shows it."""

    slot: int
    row: BoardRow
    request_id: bytes
    trace: bytes
    prompt_tokens: int
    sampled: int
    delivered: int
    cancelled: bool


class Board:
    """The tables over one buffer. Invariant: ``row`` returns only what one ``write`` wrote, whole."""

    def __init__(self, buffer: mmap.mmap | bytearray) -> None:
        self._words = memoryview(buffer).cast("Q")
        self._views: list[memoryview] = []
        self._map = buffer
        if self._words[0] != MAGIC:
            raise ValueError("not a board of this version")
        self.frontends = self._words[1]
        self.slots_per_frontend = self._words[2]

    @classmethod
    def size(cls, frontends: int, slots_per_frontend: int) -> int:
        """Bytes that a board of this shape takes."""
        return 8 * (ROWS_AT + frontends * (slots_per_frontend * ROW_WORDS + TOTALS_WORDS))

    @classmethod
    def format(cls, buffer: mmap.mmap | bytearray, frontends: int, slots_per_frontend: int) -> Board:
        """Make an empty board in a zeroed buffer."""
        words = memoryview(buffer).cast("Q")
        words[1], words[2], words[0] = frontends, slots_per_frontend, MAGIC
        words.release()
        board = cls(buffer)
        for slot in range(frontends * slots_per_frontend):
            board.write(slot, BoardRow(generation=1))
        return board

    @classmethod
    def create(cls, path: Path, frontends: int, slots_per_frontend: int) -> Board:
        """Make the file and an empty board in it."""
        with path.open("xb+") as file:
            file.truncate(cls.size(frontends, slots_per_frontend))
            return cls.format(mmap.mmap(file.fileno(), 0), frontends, slots_per_frontend)

    @classmethod
    def open(cls, path: Path, readonly: bool = False) -> Board:
        """Map an existing board."""
        with path.open("rb" if readonly else "rb+") as file:
            access = mmap.ACCESS_READ if readonly else mmap.ACCESS_WRITE
            return cls(mmap.mmap(file.fileno(), 0, access=access))

    def slice(self, frontend: int) -> range:
        """The slots that a frontend claims from."""
        return range(frontend * self.slots_per_frontend, (frontend + 1) * self.slots_per_frontend)

    def totals(self, frontend: int) -> memoryview:
        """What a frontend has counted, as words that it alone writes; they outlive it, so that its heir counts on."""
        at = ROWS_AT + self.frontends * self.slots_per_frontend * ROW_WORDS + frontend * TOTALS_WORDS
        view = self._words[at : at + TOTALS_WORDS]
        self._views.append(view)
        return view

    # -------------------------------------------------------------------------------- rows

    def row(self, slot: int) -> BoardRow:
        """The row as its owner last wrote it."""
        words, at = self._words, ROWS_AT + slot * ROW_WORDS
        while True:
            version = words[at]
            copy = at + COPIES + 4 * (version & 1)
            a, b, c, since_ns = words[copy : copy + 4]
            if words[at] == version:
                break
        return BoardRow(
            a >> 32,
            a & _LOW,
            b >> 56,
            b >> 48 & 0xFF,
            b & _LOW,
            bool(b >> 40 & 0xFF),
            c >> 56,
            c >> 48 & 0xFF,
            c & _LOW,
            b >> 32 & 0xFF,
            since_ns,
        )

    def write(self, slot: int, row: BoardRow) -> None:
        """Publish a row; only its owner calls this."""
        words, at = self._words, ROWS_AT + slot * ROW_WORDS
        version = words[at] + 1
        copy = at + COPIES + 4 * (version & 1)
        words[copy] = row.generation << 32 | row.epoch
        words[copy + 1] = row.role << 56 | row.index << 48 | row.taken << 40 | row.state << 32 | row.incarnation
        words[copy + 2] = row.from_role << 56 | row.from_index << 48 | row.from_incarnation
        words[copy + 3] = row.since_ns
        words[at] = version
        fence()

    def count(self, slot: int, prompt_tokens: int, sampled: int) -> None:
        """The owner's counters, for people."""
        self._words[ROWS_AT + slot * ROW_WORDS + COUNTS] = prompt_tokens << 32 | sampled

    def cancelled(self, slot: int, generation: int) -> bool:
        """Whether the cancel word means this generation."""
        return self._words[ROWS_AT + slot * ROW_WORDS + CANCEL] == generation

    # -------------------------------------------------------------------------------- the home frontend's words

    def claim(self, slot: int, request_id: bytes, trace: bytes) -> None:
        """Name the request that will fill a free row; the row itself is written after this."""
        words, at = self._words, ROWS_AT + slot * ROW_WORDS
        padded = request_id + trace + bytes(48 - len(request_id) - len(trace))
        words[at + IDENTITY : at + IDENTITY + 6] = memoryview(padded).cast("Q")
        words[at + COUNTS] = words[at + DELIVERED] = 0

    def identity(self, slot: int) -> tuple[bytes, bytes]:
        """The request's id (16 bytes) and trace context (25 bytes)."""
        at = ROWS_AT + slot * ROW_WORDS + IDENTITY
        padded = self._words[at : at + 6].tobytes()
        return padded[:16], padded[16:41]

    def set_cancel(self, slot: int, generation: int) -> None:
        """Ask whoever owns this generation, now or later, to cancel it."""
        self._words[ROWS_AT + slot * ROW_WORDS + CANCEL] = generation
        fence()

    def set_delivered(self, slot: int, tokens: int) -> None:
        """How many output tokens the frontend has delivered."""
        self._words[ROWS_AT + slot * ROW_WORDS + DELIVERED] = tokens

    def rows(self) -> Iterator[RowView]:
        """Every live request; each row is consistent in itself, not with the others."""
        words = self._words
        for slot in range(self.frontends * self.slots_per_frontend):
            at = ROWS_AT + slot * ROW_WORDS
            if not words[at + COPIES + 4 * (words[at] & 1) + 1] >> 56:  # most are free, and need not be read whole
                continue
            row = self.row(slot)
            if row.role:
                counts, delivered = words[at + COUNTS], words[at + DELIVERED]
                request_id, trace = self.identity(slot)
                cancelled = self.cancelled(slot, row.generation)
                yield RowView(slot, row, request_id, trace, counts >> 32, counts & _LOW, delivered, cancelled)

    # -------------------------------------------------------------------------------- the life table

    def live(self, role: int, index: int) -> int:
        """The incarnation that fills a place now; 0 if it was never filled."""
        return self._words[self._place(role, index) + INCARNATION]

    def set_live(self, role: int, index: int, incarnation: int, since_ns: int) -> None:
        """The supervisor's: a new incarnation fills the place; the one before is reaped."""
        words, at = self._words, self._place(role, index)
        words[at + PID], words[at + SINCE], words[at + PULSE], words[at + PHASE] = 0, since_ns, 0, 0
        words[at + EXPECTED] = 0
        for phase in range(len(PHASES)):
            words[at + REACHED + phase] = 0
        words[at + INCARNATION] = incarnation
        fence()

    def set_pid(self, role: int, index: int, pid: int) -> None:
        """The supervisor's: the process that fills the place."""
        self._words[self._place(role, index) + PID] = pid

    def beat(self, role: int, index: int) -> None:
        """The process's own: one more event was handled."""
        self._words[self._place(role, index) + PULSE] += 1

    def set_phase(self, role: int, index: int, phase: str, now_ns: int) -> None:
        """The process's own: how far its start-up has come, and when."""
        at, number = self._place(role, index), PHASES.index(phase)
        self._words[at + PHASE] = number
        self._words[at + REACHED + number] = self._words[at + REACHED + number] or now_ns

    def expect(self, role: int, index: int, duration_ns: int) -> None:
        """The process's own: the work it begins now will take about this long."""
        self._words[self._place(role, index) + EXPECTED] = duration_ns

    def places(self) -> Iterator[PlaceView]:
        """Every place that was ever filled."""
        for role in Role:
            for index in range(PLACES_MAX):
                at = self._place(role, index)
                words = self._words[at : at + PLACE_WORDS]
                if words[INCARNATION]:
                    phase = PHASES[min(words[PHASE], len(PHASES) - 1)]
                    yield PlaceView(
                        role,
                        index,
                        words[INCARNATION],
                        words[PID],
                        words[SINCE],
                        words[PULSE],
                        phase,
                        words[EXPECTED],
                        tuple(words[REACHED : REACHED + len(PHASES)]),
                    )

    def set_gauges(self, values: tuple[int, ...]) -> None:
        """The scheduler's: the first of ``GAUGE_NAMES``, as many as there are values."""
        assert len(values) <= len(GAUGE_NAMES) <= REACHED - GAUGES
        at = self._place(Role.SCHEDULER, 0) + GAUGES
        for offset, value in enumerate(values):
            self._words[at + offset] = value

    def gauges(self) -> dict[str, int]:
        """What the scheduler last published."""
        at = self._place(Role.SCHEDULER, 0) + GAUGES
        return dict(zip(GAUGE_NAMES, self._words[at : at + len(GAUGE_NAMES)], strict=True))

    def close(self) -> None:
        """Unmap."""
        for view in (*self._views, self._words):
            view.release()
        if isinstance(self._map, mmap.mmap):
            self._map.close()

    @staticmethod
    def _place(role: int, index: int) -> int:
        assert 0 <= index < PLACES_MAX
        return HEADER_WORDS + (role * PLACES_MAX + index) * PLACE_WORDS
