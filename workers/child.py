"""The entry point of every child: ``python -m baton.workers.child LAUNCH_FILE`` runs one role until it is halted.

It imports only what the role needs. A child whose supervisor is gone ends at once, by signal and by lifeline.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import importlib
import logging
import os
import signal
import sys
from pathlib import Path

import msgspec
import uvloop

from baton.ipc.frames import Role
from baton.ipc.log import Adopted
from baton.workers.config import Launch
from baton.workers.dump import STACKS_SIGNAL, STACKS_SUFFIX
from baton.workers.process import Process, live
from baton.workers.surroundings import Machine

MODULES = {
    Role.FRONTEND: "baton.frontends.process",
    Role.TOKENIZER: "baton.workers.tokenizer",
    Role.SCHEDULER: "baton.workers.scheduler",
    Role.WORKER: "baton.workers.gpu",
    Role.DETOKENIZER: "baton.workers.detokenizer",
}
AUTOGROUP = Path("/proc/self/autogroup")
_PR_SET_PDEATHSIG = 1


async def _run(launch: Launch) -> int:
    me = launch.address
    process = Process(launch, me, Machine(launch, me))
    logging.getLogger().addHandler(Adopted(process.log))
    loop = asyncio.get_running_loop()
    weigh_session(loop)
    loop.add_reader(launch.lifeline, _orphaned)
    loop.set_exception_handler(process.loop_failed)
    process.phase("importing")
    run = importlib.import_module(MODULES[me.role]).run
    process.phase("loading")
    return await live(process, run)


def give_way(role: Role, niceness: int) -> None:
    """A step waits for its slowest thread, so what works beside the steps is less urgent than what makes them."""
    os.nice(0 if role in (Role.WORKER, Role.SCHEDULER) else niceness)


def weigh_session(loop: asyncio.AbstractEventLoop, tries: int = 50) -> None:
    """A child is a session of its own, and where the kernel groups processes by session (``sched_autogroup_enabled``)
    it weighs the groups, not their members: the group is to be as nice as its process.

    The kernel takes ten such wishes a second from all who may not administer it, and asks the others to try again.
    """
    own = os.nice(0)
    try:
        if AUTOGROUP.read_text().split()[-1] != str(own):
            AUTOGROUP.write_text(str(own))
    except BlockingIOError:
        if tries:
            loop.call_later(0.15, weigh_session, loop, tries - 1)
    except OSError:
        pass  # there are no such groups here


def _orphaned() -> None:
    os._exit(4)


def main(argv: list[str]) -> int:
    """Run the process that the launch file describes; the exit status is 0 after a halt."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    launch = msgspec.json.decode(Path(argv[0]).read_bytes(), type=Launch)
    give_way(Role(launch.role), launch.settings.niceness)
    stacks = Path(argv[0]).with_suffix(STACKS_SUFFIX)
    with stacks.open("w") as file:  # a dump asks for the stacks by this signal, and the loop need not be alive for it
        faulthandler.register(STACKS_SIGNAL, file)
        return uvloop.run(_run(launch))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
