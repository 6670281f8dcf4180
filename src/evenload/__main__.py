"""`python -m evenload`: the command line, also where its script is not on the PATH."""

from evenload.cli.main import main

if __name__ == "__main__":
    main()
