"""One module per published claim; drives the lab and the workers through their public interfaces."""
