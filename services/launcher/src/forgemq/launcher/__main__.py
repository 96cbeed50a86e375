"""`python -m forgemq.launcher`, the same as the command `forgemq`."""

from forgemq.launcher.command_line import main

if __name__ == "__main__":
    main()
