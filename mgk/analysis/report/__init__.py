"""Report of an analysis: HTML page, figures, tables and findings in sentences."""
