from mgk.cli import main

main()
