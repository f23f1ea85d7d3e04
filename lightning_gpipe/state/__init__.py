"""Who holds which tensor."""
