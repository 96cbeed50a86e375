"""`python -m forgemq_launcher`, the same as the command `forgemq`."""

from forgemq_launcher.command_line import main

if __name__ == "__main__":
    main()
