"""This package has helpers for all other packages: checks of arguments, units, tables, documents, errors.
Torch-free.
"""
