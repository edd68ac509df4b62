"""A run as a page: tables, charts as inline SVG, and a timeline for Perfetto. Pure but for reading records."""
