"""Attribution of each GPU operation to its launch, its ranges and its process."""
