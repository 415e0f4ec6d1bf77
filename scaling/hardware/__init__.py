"""What the machine is: cores, memory, versions."""
