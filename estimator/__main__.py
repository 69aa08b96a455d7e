"""The command line where its script is on no path: ``python -m estimator estimate …``."""

from estimator.cli.main import main

if __name__ == "__main__":
    main()
