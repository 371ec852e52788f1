// Command penstock is the storage node, the planner, the gateway and the operators' commands in one
// binary. Most commands have the form noun verb, such as block put.
//
//	penstock serve                          the storage node
//	penstock status | doctor | version      its health, and the reason if it is not healthy
//	penstock ns | block | prefix | pin      its contents
//	penstock store                          volumes while no node serves them
//	penstock nic                            NICs and GPUs of this host
//	penstock trace | bench | demo           its behaviour under load
//
// The package is the composition root: only here are concrete devices, transfer engines and stores
// passed to the packages that use them. It makes no caching decisions.
//
// A command is a function that returns a *cobra.Command. There is no package state. So a test runs
// whole commands in its own process, each with its own world: standard streams and environment.
// Results go to standard output, as a table or as JSON (--format). Errors, warnings and progress go
// to standard error.
//
// Exit codes: 0 success; 1 failure; 2 an invalid command line or configuration; 3 the requested
// object does not exist, or not all of it; 4 the node is busy, try again; 5 another command has ended
// the work that this one waited for; 130 and 143 SIGINT or SIGTERM ended the command before it was done.
package main
