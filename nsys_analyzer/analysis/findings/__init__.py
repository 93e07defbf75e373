"""What slows a step down: rules in a file for each family, and the diagnosis that ranks what they find."""
