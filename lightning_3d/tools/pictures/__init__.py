"""Pictures of plans, layouts, runs and sweeps: described once, drawn as PNG (matplotlib) or on a page (Plotly)."""
