"""`python -m pipedream` is the `pipedream` command."""

from pipedream.cli import main

if __name__ == "__main__":
    main()
