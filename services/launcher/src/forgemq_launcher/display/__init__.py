"""What people see of a run: terminal, panel, curves, report files."""
