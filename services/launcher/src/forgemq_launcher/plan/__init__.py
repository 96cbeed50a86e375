"""What a run needs of the machines it is planned for; arithmetic without I/O."""
