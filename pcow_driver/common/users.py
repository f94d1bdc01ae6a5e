# SPDX-License-Identifier: Apache-2.0
"""Work that root does as another user, with none of its own rights, and nothing else of root's: a
program that is started meanwhile can be traced by that user.
"""

from __future__ import annotations

from collections.abc import Callable
import os
import pwd
import signal

from pcow_driver.common import exception

_MAX_MESSAGE = 4096
_UMASK = 0o077  # what others need has its mode by chmod
# beginnings of names of variables that stay; oslo.config reads options of OS_PCOW__...
_KEPT = ('PCOW_', 'OS_PCOW')


def run_as(uid: int, function: Callable[[], None]) -> None:
    """Call a function as a user, with its groups, in a process of its own; in this one, if this is
    that user. Not for programs with threads.

    That process has a session, so that no terminal is its own. Its environment is ``PATH``,
    ``LANG``, what sets options of pcow, and the user's ``HOME``. It ends if this call is
    interrupted.

    :raises ToolFailed: the function has raised, with what it said; or there is no such user
    """
    if uid == os.geteuid():
        function()
        return
    reader, writer = os.pipe()  # programs that the function starts do not inherit it
    pid = os.fork()
    if not pid:
        _child(uid, function, writer)
    try:
        os.close(writer)
        with open(reader, 'rb') as pipe:
            said = pipe.read().decode(errors='replace')
    except BaseException:
        os.kill(pid, signal.SIGTERM)  # the terminal's signals do not reach it
        os.waitpid(pid, 0)
        raise
    _pid, status = os.waitpid(pid, 0)
    if status:
        raise exception.ToolFailed(
            tool='pcowctl',
            exit_code=os.waitstatus_to_exitcode(status),
            message=said or f'what was done as user {uid} ended without a message',
        )


def _child(uid: int, function: Callable[[], None], writer: int) -> None:
    code = 1
    try:
        _become(uid)
        function()
        code = 0
    except BaseException as e:
        os.write(writer, (str(e) or repr(e)).encode(errors='replace')[:_MAX_MESSAGE])
    finally:
        os._exit(code)


def _become(uid: int) -> None:
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        raise exception.PcowError(
            reason=(
                f'this host knows no user {uid}, whose file it is: make it known here (in a '
                f'container, with the number that it has outside), or give the file to one that is'
            )
        ) from None
    os.setsid()  # else it could type into root's terminal (TIOCSTI)
    os.initgroups(entry.pw_name, entry.pw_gid)
    os.setresgid(entry.pw_gid, entry.pw_gid, entry.pw_gid)
    os.setresuid(uid, uid, uid)
    os.chdir('/')
    os.umask(_UMASK)
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in ('PATH', 'LANG') or name.startswith(_KEPT)
    }
    os.environ.clear()
    os.environ.update(kept, HOME=entry.pw_dir)
