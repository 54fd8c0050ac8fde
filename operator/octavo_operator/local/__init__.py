"""`octavo up`: the resource that a cluster takes, reconciled onto processes of this machine."""
