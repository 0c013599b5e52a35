"""Graphs, schedules, timelines and findings for people: terminal, SVG, Mermaid, DOT, JSON. Needs rich."""
