"""This package traces any module's forward and divides it between stages. docs/models.md says how."""
