"""The command line tool `forgemq`: from its start to its exit status.

Importing a command takes a good part of a second, in which Ctrl-C would be a traceback. So this
file imports nothing at its top, where nobody could catch it, but within `main`; and from the first
moment that the signal can be handled, it ends the process at once.
"""


def main() -> None:
    """Run the tool and exit with its status."""
    try:
        _run_and_exit()
    except KeyboardInterrupt:  # In the first imports, or of a command with nothing to put in order.
        from forgemq_launcher import exit_status

        raise SystemExit(exit_status.INTERRUPTED) from None


def _run_and_exit() -> None:
    import os
    import signal
    import sys

    # A shell's background process ignores Ctrl-C, and goes on to.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    from forgemq_launcher.arguments import PROGRAM

    try:
        status = _run(sys.argv[1:])
    except OSError as error:  # A full disk, or a path that cannot be read or written.
        # If it is the output itself, the interpreter else tries once more and makes the status 120.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(f"{PROGRAM}: {error}")
    sys.exit(status)


def _run(arguments: list[str]) -> int:
    from forgemq_launcher.arguments import options_of
    from forgemq_settings.hidden_process import hide_process

    hide_process()
    options = options_of(arguments)  # `--help` is printed here, and needs nothing below.
    import logging
    import os
    import signal

    from forgemq_launcher.dispatch import run_command
    from forgemq_launcher.display.lines import terminal

    # Broker clients log every retry; the tool prints what finally failed, once.
    logging.getLogger().addHandler(logging.NullHandler())
    # The tool is an entry point like a service's __main__: it reads the environment once.
    environ = dict(os.environ)  # noqa: TID251
    console, refusals = terminal(), terminal(is_stderr=True)
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run_command(options, environ=environ, console=console, refusals=refusals)


def _leave(*_: object) -> None:
    """End the process: nothing is begun that must be put in order."""
    import os

    from forgemq_launcher import exit_status

    os._exit(exit_status.INTERRUPTED)
