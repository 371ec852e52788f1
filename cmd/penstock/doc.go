// Command penstock is the storage node and everything that a person does to it:
// one binary, noun and verb.
//
//	penstock serve                          the storage node
//	penstock status | doctor | version      is it well, and why not
//	penstock ns | block | prefix | pin      what it holds
//	penstock store                          volumes that no node serves at the moment
//	penstock nic                            NICs and GPUs of this host
//	penstock trace | bench | demo           what it does under load
//
// It is the composition root: here alone concrete devices, transfer engines and
// stores meet the contracts. It decides nothing about caching itself.
//
// A command is a function that returns a *cobra.Command; there is no package
// state, so a test runs whole commands in its own process, with a world of its
// own. Results go to standard output, as a table or as JSON (--format); errors,
// warnings and progress go to standard error.
//
// Exit codes: 0 done; 1 it failed; 2 the command line or the configuration is
// wrong; 3 what was asked for is not there, or not all of it; 4 the node is busy:
// try again; 130 and 143 a command that SIGINT or SIGTERM ended before it was done.
package main
