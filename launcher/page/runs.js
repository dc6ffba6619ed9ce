main();
