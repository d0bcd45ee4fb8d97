"""The commands of the command line, by what they are about; `diffcheck.cli` puts them together."""
