"""How versions come to a site and its updates leave it, and what the site keeps on disk between rounds."""
