from mgk.cli import main

# A process that this one starts to time a model imports this file too, under another name.
if __name__ == "__main__":
    main()
