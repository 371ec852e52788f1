// Package config is what a storage node (Config) and a planner node (Planner)
// can be told, and the order in which they are told: a default, then the YAML
// file, then the environment, then flags.
//
//	key in YAML            environment                     flag of penstock serve, penstock planner
//	data                   PENSTOCK_DATA                   --data
//	auth.token_file        PENSTOCK_AUTH_TOKEN_FILE        --auth-token-file
//	<path.to.key>          PENSTOCK_<PATH_TO_KEY>          --<path-to-key>
//
// Every key exists in all three places under the same name, made from the
// struct tags of the two; there is no second list of names. A key that does not
// exist is refused by name, in the file and in the environment. It reads the
// file given and nothing else; it opens no sockets and starts nothing.
package config
