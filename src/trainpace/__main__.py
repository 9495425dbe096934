"""``python -m trainpace``."""

from trainpace.cli import main

if __name__ == "__main__":
    main()
