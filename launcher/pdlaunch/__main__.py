"""`python -m pdlaunch`."""

from pdlaunch.cli import main

if __name__ == "__main__":
    main()
