"""HTML pages without scripts: templates that escape everything, charts as SVG, and figures as people read them."""
