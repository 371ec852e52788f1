"""``python -m penstock`` is the ``penstock`` program."""

from penstock._program import main

if __name__ == "__main__":
    main()
