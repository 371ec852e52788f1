// Package config has the settings of a storage node (Config), a planner node (Planner) and a
// gateway (Gateway), and their sources: a default, then the YAML file, then the environment, then
// flags. A later source overrides an earlier one.
//
//	key in YAML            environment                     flag of penstock serve, penstock planner
//	data                   PENSTOCK_DATA                   --data
//	auth.token_file        PENSTOCK_AUTH_TOKEN_FILE        --auth-token-file
//	<path.to.key>          PENSTOCK_<PATH_TO_KEY>          --<path-to-key>
//
// Every key exists in the file, in the environment and as a flag under the same name, which comes
// from the struct tags; there is no second list of names. An unknown key in the file or in the
// environment is refused, and the error names it. The tag reload or restart of a key states whether
// a running process can change the setting. Changes compares two configurations. The package reads
// only the given file; it opens no sockets and starts nothing.
package config
