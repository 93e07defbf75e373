"""``python -m nsys_analyzer``."""

from nsys_analyzer.cli.main import main

if __name__ == "__main__":
    main()
