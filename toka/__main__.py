"""`python -m toka` is `toka`."""

from toka.cli import main

if __name__ == "__main__":
    main()
