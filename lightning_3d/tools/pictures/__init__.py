"""Pictures of plans, layouts, runs and sweeps: described once, drawn by matplotlib, as PNG or as SVG on a page."""
