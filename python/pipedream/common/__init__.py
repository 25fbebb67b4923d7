"""This package has helpers that every other part uses: checks of arguments, units, tables, documents, errors.
Torch-free.
"""
