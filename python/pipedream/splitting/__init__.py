"""Any module's forward, traced and divided between stages. docs/models.md says how."""
