"""`python -m halfbyte_lab`."""

from halfbyte_lab.bench import main

if __name__ == "__main__":
    main()
