"""Commands that look at a run or prepare one, besides `forgemq run`."""
