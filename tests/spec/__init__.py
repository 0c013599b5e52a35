"""The `.ppspec` language: parser, checker, formatter, and what surrounds them."""
