"""`python -m halfbyte_lab`."""

from halfbyte_lab.cli import main

if __name__ == "__main__":
    main()
