"""From a model to the disk, and to the files of other tools."""
