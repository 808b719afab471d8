"""HTML pages without scripts: templates that escape everything, charts as SVG, and readable figures."""
