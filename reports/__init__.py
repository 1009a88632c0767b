"""A store and its judged cells, shown: `html` (one offline file), `markdown` (pull requests), `terminal`, `plots`."""
